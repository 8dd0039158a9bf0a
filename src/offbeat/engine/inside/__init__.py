"""Code that runs inside other engines' processes: this folder goes on their PYTHONPATH, and nothing in it imports `offbeat`."""
