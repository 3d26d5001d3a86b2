"""Messages between the processes of a run: framed, authenticated, checked."""
