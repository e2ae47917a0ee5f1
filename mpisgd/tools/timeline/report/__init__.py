"""The report: a page that shows a timeline in pictures, by itself, without network.

figures     step times, where the time goes, links, memory: numbers out of the events
coverage    how much of any stretch of time some intervals cover
excerpt     the events of a few steps, as rows and columns
page        all of it as compact JSON in one HTML file, with page.css and page.js
"""
