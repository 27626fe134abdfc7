"""What runs have measured, and how long documents are, as pictures. matplotlib is optional, and imported inside."""
