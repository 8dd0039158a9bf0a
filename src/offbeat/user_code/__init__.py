"""The code of users: its names, the objects that carry it to other processes, and one pool of processes in which it runs."""
