"""The control loop: what is measured, what is concluded from it, and what is decided next.

Pure: no Ray, no files, no clocks. The loop beside a job, the simulation that a policy learns in, and its evaluation
all run this code.
"""
