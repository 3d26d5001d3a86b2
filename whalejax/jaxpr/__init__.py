"""Traced programs: cut into steps, and rebuilt around other bodies."""
