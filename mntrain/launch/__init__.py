"""The command `launch`: starts a job again on the hosts that are left when a machine was lost."""
