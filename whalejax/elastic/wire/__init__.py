"""Messages between the processes of an elastic run: framed, authenticated, checked."""
