"""What happened, kept in a file, and played again."""
