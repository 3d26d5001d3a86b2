"""The plan as data, its files, and what is checked when it is read."""
