"""What is read from the files of a timeline: a summary, and the page of a report."""
