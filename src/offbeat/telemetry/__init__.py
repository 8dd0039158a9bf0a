"""Logs, statistics, traces and the files that reports are drawn from."""
