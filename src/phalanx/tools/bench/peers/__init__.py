"""Who is measured: a row for each library, in `table.py`."""
