"""Software repair: libraries with seeded bugs, which their own tests catch."""
