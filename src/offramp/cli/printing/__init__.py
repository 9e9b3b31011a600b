"""What commands print: the two consoles, progress on the way, tables at the end."""
