"""Acting on a running job from outside: where jobs are found, what they are asked over HTTP, and what they answer."""
