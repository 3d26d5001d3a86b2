"""Several processes: launch, rendezvous, heartbeats and checks of hosts."""
