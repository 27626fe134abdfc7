"""What runs on disk have measured, as tables and pictures. No torch; matplotlib, an optional package, for pictures."""
