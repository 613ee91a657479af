"""Pipeline parallelism: stages, schedules, and what travels between stages."""
