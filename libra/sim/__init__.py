"""The system in virtual time, under the same policy objects as the live one: discrete events,
seeded, no clock."""
