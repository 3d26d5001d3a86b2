"""Traced programs: cut into steps, put together, and rebuilt around other bodies."""
