"""``whalejax jobs``: its options and what it prints."""
