"""Runs a child process; see `serving.main`."""

from offbeat.process.serving import main

if __name__ == "__main__":
    main()
