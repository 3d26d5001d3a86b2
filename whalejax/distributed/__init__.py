"""Several processes: launching, meeting, heartbeats and checks of hosts."""
