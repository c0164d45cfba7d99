"""The command line: ``libra run | config | inspect | doctor``."""
