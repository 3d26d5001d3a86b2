"""What several processes check and watch while they run one step."""
