"""The functions that users call, one collective a file."""
