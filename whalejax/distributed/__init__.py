"""Several processes: launching, joining, heartbeats and checks of hosts."""
