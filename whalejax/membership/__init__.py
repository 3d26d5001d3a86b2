"""Rules without sockets for the members of a run, their losses and the consequences."""
