"""Datasets and their tasks."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewDataset, NewTasks
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery, TaskQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.registry import (
    DatasetDetailSerializer,
    DatasetSerializer,
    StoredTaskSerializer,
    StoredTasksSerializer,
    TaskSerializer,
)
from rollouts.selectors import registry as selectors
from rollouts.services import registry


class DatasetList(ListView):
    @documented("list_datasets", "Datasets, newest first", page_of(DatasetSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(selectors.datasets_of(self.project), lambda rows: DatasetSerializer(rows, many=True).data)

    @documented("create_dataset", "Make an empty dataset", DatasetSerializer, status=201, body=NewDataset, creates=True)
    @idempotent
    def post(self, request: Request) -> Response:
        body = self.body(NewDataset)
        dataset = registry.create_dataset(project=self.project, name=body.name, environment=body.environment)
        return Response(DatasetSerializer(dataset).data, status=201)


class DatasetDetail(ApiView):
    @documented("get_dataset", "A dataset with the number of its tasks", DatasetDetailSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        dataset = find(selectors.datasets_of(self.project), id)
        return Response({**DatasetSerializer(dataset).data, **selectors.task_counts(dataset)._asdict()})


class TaskList(ListView):
    query_model = TaskQuery
    oldest_first = True

    @documented("list_tasks", "Tasks of a dataset, oldest first", page_of(TaskSerializer), query=TaskQuery)
    def get(self, request: Request, id: UUID) -> Response:
        dataset = find(selectors.datasets_of(self.project), id)
        tasks = selectors.tasks_of(dataset, quarantined=self.query.quarantined)
        return self.page(tasks, lambda rows: TaskSerializer(rows, many=True).data)

    @documented("add_tasks", "Add tasks, all or none", StoredTasksSerializer, status=201, body=NewTasks, creates=True)
    @idempotent
    def post(self, request: Request, id: UUID) -> Response:
        dataset = find(selectors.datasets_of(self.project), id)
        body = self.body(NewTasks)
        tasks = registry.add_tasks(dataset=dataset, tasks=[registry.TaskRequest(task.key, task.payload) for task in body.tasks])
        return Response({"tasks": StoredTaskSerializer(tasks, many=True).data}, status=201)
