"""The timeline: what every rank communicated and when, in a file that Perfetto and Chrome show."""
