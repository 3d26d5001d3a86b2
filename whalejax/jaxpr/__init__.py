"""Traced programs: divided into steps, spliced, and rebuilt with other bodies."""
