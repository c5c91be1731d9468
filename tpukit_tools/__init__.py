"""The desk: doctor, migrate, plan, compare, trace, and the command line. The library knows none of them."""
