"""Decides and composes: sweep files, search, launch, leaderboard, report, command line."""
