"""What a user asks for: open, convert, reshard and the other conversions, diff, inspect."""
