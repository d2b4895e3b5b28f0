"""``python -m dynamiccl_ray`` is the command line."""

from dynamiccl_ray.cli.app import main

if __name__ == "__main__":
    main()
