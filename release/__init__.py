"""From the repository to its users: notebooks that are one file each, and a repository ready to publish."""
