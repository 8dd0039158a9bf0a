"""What episodes are played against, each as an `Environment`: a user's own class, tools, and the games of other libraries."""
