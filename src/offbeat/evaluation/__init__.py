"""What an evaluation measured: answers and their scores, intervals, files, and the paired comparison of two models. Torch-free."""
