"""The processes of an engine world."""
