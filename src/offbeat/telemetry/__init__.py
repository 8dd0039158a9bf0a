"""Logs, statistics, traces, and the files from which reports are drawn."""
