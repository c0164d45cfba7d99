"""What ``libra cluster slurm up`` starts, for tests: as if workers had always started at once, and idle for a moment only."""

from libra.cluster import slurm_service
from libra.policy import tool_fleet

if __name__ == "__main__":
    tool_fleet.START_S, tool_fleet.IDLE_S = 0.01, 0.2
    slurm_service.main()
