"""The shipped configurations, one TOML file per target and drafter pair."""
