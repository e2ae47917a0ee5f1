"""The transport between hosts: reduce on each host, across the hosts, and on each host again."""
