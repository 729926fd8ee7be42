"""The planner: load -> allocation (`policy`) -> slots, groups, rows and arrivals (`rows`)."""
