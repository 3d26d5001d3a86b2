"""Rules for the members of a run, their failures and what follows; uses no sockets."""
