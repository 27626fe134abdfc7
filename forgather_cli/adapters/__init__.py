"""A room: adapters (``adapter=lora``, ``dora``, ``qlora``), small trained matrices beside those of a frozen model."""
