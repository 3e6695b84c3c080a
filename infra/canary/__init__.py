"""The canary: a first run on an account, which shows whether this project's assumptions about AWS hold there."""
