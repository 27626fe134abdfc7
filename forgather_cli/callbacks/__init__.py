"""What watches a run: the event protocol and one file per callback."""
