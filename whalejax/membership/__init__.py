"""Who takes part in a run, who is lost, and what follows: rules without sockets."""
