"""Rules for the members of a run and for their failures; uses no sockets."""
