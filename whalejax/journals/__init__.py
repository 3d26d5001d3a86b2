"""What runs write of themselves as they go, and what can be read from it."""
