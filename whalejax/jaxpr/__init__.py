"""Traced programs: divided into steps, spliced, and rebuilt around other bodies."""
