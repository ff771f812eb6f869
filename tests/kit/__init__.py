"""Stand-ins and makers that tests of several rooms share: a noun a file."""
