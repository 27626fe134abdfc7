"""What people read while they wait, on any terminal: bars, and lines that are folded where no command is broken."""
