"""``whalejax jobs``: options and output."""
